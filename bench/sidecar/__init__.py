"""What do engines get from `kvtier sidecar`, and what becomes of them and of it when something goes wrong?"""
