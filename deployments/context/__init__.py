"""The group context: tokens and lengths learned online about a group, kept in actors for the engines' drafts."""
