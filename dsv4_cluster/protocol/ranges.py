"""Ranges of sampling values, for every edge that checks them."""

MAX_TEMPERATURE = 100.0  # far beyond use, and in fp32 still a number that logits can be divided by
MAX_PENALTY = 2.0  # of presence and frequency, either sign; OpenAI's range
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # logits of fp32 stay finite within it
MAX_BIAS = 100.0  # either sign; OpenAI's range, at its ends a token is all but banned or all but forced
