"""What the site does beside MkDocs."""

from __future__ import annotations

import re
from typing import Any

# Weights of hits in the search, by the beginning of the page: answers and tasks before inner workings and results.
BOOSTS = {"faq": 4.0, "how/": 0.5, "reference/": 1.0, "benchmarks": 0.3, "gpu": 0.3, "largest": 0.3, "learned": 0.3}
BOOSTS |= {"changelog": 0.3, "": 2.0}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set how much hits on the page count in the search, and keep the text of links to files outside of the site."""
    boost = next(boost for begin, boost in BOOSTS.items() if page.file.src_uri.startswith(begin))
    page.meta["search"] = {"boost": boost}
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{page.file.src_uri.count('/') + 1}}}[^)]+\)", r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    r"""Write `|` for the `\|` that GitHub needs in code within a table, and that Python-Markdown shows as it is."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
