"""The OpenAI-compatible HTTP interface.

`parsing` checks what is asked, `access` who asks, `inbox` hands it to the ranks, `responses` puts events into the
interface's words (none of them knows HTTP's library), `app` has the routes (Starlette), `server` what uvicorn is told.
"""
