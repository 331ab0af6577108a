"""Stand-ins of the platform's runtime, one per generation: the names that a template may import, and no more.

`april` is 0.1.2: no capabilities, no snapshots, no wedge, and a heartbeat that is told of no more than one task. `may`
has them all, `august` adds hooks of its own. They show which names may be missing and what a host does with an adapter
(`tests.e2e.foreign_host`), and nothing about what the real packages do inside. All of them run on the A2A SDK of this
project; the real one of April needs an older one.
"""
