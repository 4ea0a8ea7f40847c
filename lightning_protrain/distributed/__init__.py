"""Several ranks that train one model: how they meet, agree and fail together."""
