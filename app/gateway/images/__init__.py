"""Images of chats: their files as requests send them, and the features that vLLM's processor makes of them."""
