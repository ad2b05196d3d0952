"""The OpenAI-compatible HTTP interface.

`access` decides who may send requests, `parsing` checks their bodies (values by `options`), `inbox` connects rank 0 and
the process of the interface, and `responses` formats events as answers, with calls of `tools`; none of these depends on
an HTTP library. `app` has the routes (Starlette), `metrics` the figures for operators (Prometheus), and `server` is the
process, with uvicorn.
"""
