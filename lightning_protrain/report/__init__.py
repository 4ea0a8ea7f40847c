"""Shows plans and compares runs with them: tables, the page with its charts, the monitor, the timeline."""
