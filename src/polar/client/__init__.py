"""What programs that train call (polar.Client, polar.AsyncClient): no server, engine or tokenizer is imported here.

submitting ─► calls (retries, patience) ─► the rollout server ─► feed: pages of results, each once
"""
