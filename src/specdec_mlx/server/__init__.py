"""A server for agents: OpenAI's and Anthropic's protocols over one engine that speculates."""
