"""Chats of the gateway: converts messages with tool calls to prompts, and answers to messages."""
