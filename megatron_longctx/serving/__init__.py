"""Text for models: ranks that run a checkpoint, generation, chat, the HTTP server.

`inference_job` starts the ranks and gives rank 0 the engine; `generate` and `serve` are the verbs; `text_stream` turns
tokens into text as they come; `http_api` is the OpenAI-compatible server, of which only `app` and `server` know
Starlette and uvicorn.
"""
