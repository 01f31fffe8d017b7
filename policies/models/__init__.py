"""Cost models and estimators: seconds of steps, prompts and pulls, and the gain of speculation."""
