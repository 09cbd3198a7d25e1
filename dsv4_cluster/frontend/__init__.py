"""The HTTP surface: OpenAI-style endpoints over a GenerationService. No Ray, no torch, no engine."""
