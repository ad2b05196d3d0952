"""The OpenAI-compatible HTTP interface.

`access` decides who may send requests, `parsing` checks their bodies, `inbox` passes them to the ranks, and `responses`
formats events as answers; none of these depends on an HTTP library. `app` has the routes (Starlette), and `server`
configures uvicorn.
"""
