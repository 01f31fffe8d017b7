"""Rules of requests for tokens: changed logits, forms of answers, stop texts. Each is a function of a sample's
tokens.
"""
