"""Gateway nodes on a Ray cluster: placed and restarted by Ray, joined to the server over HTTP.

polar up ─► ray.py (RayCluster) ─pipe─► driver.py, nodes.py ─Ray─► actor.py, one a machine ─HTTP─► polar up
"""
