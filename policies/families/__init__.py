"""The policy families: every member is a frozen pydantic model with one method that decides."""
