"""All settings a user may write, plus the model shape read from a checkpoint."""
