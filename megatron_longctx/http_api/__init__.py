"""The OpenAI-compatible HTTP interface.

`requests` checks what is asked, `access` who asks, `answers` puts events into the interface's words (none of them knows
HTTP's library), `inbox` hands it to the ranks, `app` has the routes, on Starlette, and `server` what uvicorn is told.
"""
