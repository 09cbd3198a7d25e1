"""Moving live KV bytes from a prefill engine to a decode engine, verified before anything is handed over."""
