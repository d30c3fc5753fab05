"""The Serve application: router, HTTP API and command line.

`app.build` turns one configuration into three Serve deployments: routers, targets and drafters (`deployments`). A
router (`router`) keeps the ledger of every session, assigns a target and a drafter, and streams committed tokens to the
HTTP API (`api`). Target and draft replicas wrap the pure schedulers of `cluster` and the models of `actors`. `startup`
does the slow work before a replica serves.

`operations` starts, updates and inspects deployments for the command line (`cli`), `publishing` exports metrics through
Ray, `status` renders tables and `page` the live page. Text exists only in this package; all packages below it only
handle token ids.
"""
