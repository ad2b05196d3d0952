"""Text generation: ranks that run a checkpoint, `generate`, chats, the HTTP server.

`inference_job` starts the ranks and builds their engine. `generate` and `serve` are the verbs. `text_stream` decodes
tokens into text as they arrive, and `grammar` makes them follow a schema. `http_api` is the OpenAI-compatible server;
only its `app` and `server` import Starlette and uvicorn.
"""
