"""The router: admission, and the story of one request from prefill through decode. Pure asyncio, no Ray, no HTTP."""
