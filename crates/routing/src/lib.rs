//! Routing: load ledger, cost model and policies that choose a worker for a request.
