"""Chats of the gateway: messages with tool calls to prompts, and answers to messages."""
