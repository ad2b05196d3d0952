"""The OpenAI-compatible HTTP interface.

`requests` checks what is asked, `answers` puts events into the interface's words (neither knows HTTP's library), `app`
has the routes, on Starlette, and `server` what uvicorn is told.
"""
