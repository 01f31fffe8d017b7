"""The group context: what is learned online about a group, kept beside the engines and fed to their drafts."""
