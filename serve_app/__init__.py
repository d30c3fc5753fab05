"""The mouth: the Serve application, the router, the OpenAI-compatible API, the command line.

Text lives here and nowhere else.
"""
