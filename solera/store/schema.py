"""The ledger's tables, declared once."""

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, String, Table, UniqueConstraint

metadata = MetaData()

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("prompt_key", String, nullable=False),
    Column("lineage", String),
    Column("version", Integer, doc="oldest version that wrote one of its tokens"),
    Column("origin", String, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("temperature", Float),
    Column("max_tokens", Integer),
    Column("top_p", Float),
    Column("created", Float, nullable=False, doc="seconds since 1970"),
    Column("sequences", LargeBinary, nullable=False, doc="see encoding.py"),
    Column("superseded", Integer, nullable=False, server_default="0", doc="written after the checkpoint resumed from"),
    Column("uses", Integer, nullable=False, server_default="0", doc="rows in uses, counted so that drawing is fast"),
    Index("rollouts_by_uses", "uses", "id", "prompt_key"),
)

rewards = Table(
    "rewards",
    metadata,
    Column("id", Integer, primary_key=True, doc="in the order of arrival"),
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False),
    Column("part", String, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("value", Float, nullable=False),
    Column("source", String, nullable=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("rollout_id", "part", "revision"),
)

uses = Table(
    "uses",
    metadata,
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False),
    Column("version", Integer, nullable=False, doc="of the learner, before it learned from this"),
    Column("age", Integer),
    Column("advantage", Float),
    UniqueConstraint("rollout_id", "version"),
    Index("uses_by_version", "version"),
)
