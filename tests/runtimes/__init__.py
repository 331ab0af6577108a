"""Stand-ins of the platform's runtime, one per generation: the names that a template may import, and no more.

`april` is 0.1.2: no capabilities, no snapshots, no wedge, and a heartbeat that receives one task at most. `may` has all
of them, and `august` adds hooks of its own. They show which names may be missing and what a host does with an adapter
(`tests.e2e.simulated_runtime`), and nothing about what the real packages do inside. All of them use this project's A2A
SDK; the real one of April needs an older one.
"""
