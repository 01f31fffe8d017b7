"""The drafts of one engine: proposals from the index or a draft model, cut to a budget."""
