"""Text for models: ranks that run a checkpoint, generation, chat, the HTTP server."""
