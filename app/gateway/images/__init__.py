"""Images of chats: their files as requests send them, and the features that vLLM's processor of the model makes of them."""
