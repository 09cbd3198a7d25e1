"""The cache: pools of rows, pages, and who owns them."""
