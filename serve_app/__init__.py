"""The Serve application: router, HTTP API and command line.

`app.build` turns one configuration into Serve deployments (`deployments`): routers, a target pool per model, draft
pools, and a trainer per draft that learns. A router (`router`) keeps the ledger of every session, assigns a target and
a drafter, and streams committed tokens to the HTTP API (`api`). Target and draft replicas wrap the pure schedulers of
`cluster` and the models of `actors`. `startup` downloads, loads and measures models before a replica serves.

`operations` starts, updates and inspects deployments for the command line (`cli`). `publishing` exports metrics through
Ray. `status` renders terminal tables, and `page` serves the live page. Only this package handles text; the packages
below it handle token ids.
"""
