"""Cost models and estimators: how long steps, prompts and pulls take, and what speculation brings."""
