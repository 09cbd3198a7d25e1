"""Reading and writing cache rows."""
