"""Text generation: ranks that run a checkpoint, `generate`, chats, the HTTP server.

`inference_job` starts the ranks and gives rank 0 the engine. `generate` and `serve` are the verbs. `text_stream` turns
tokens into text as they arrive. `http_api` is the OpenAI-compatible server; only its `app` and `server` import
Starlette and uvicorn.
"""
