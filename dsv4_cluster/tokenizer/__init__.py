"""Text: the official chat encoding through deepseek-recipe, raw text, incremental detokenising, stop strings."""
