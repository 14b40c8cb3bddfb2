"""The ledger's tables, declared once."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    literal_column,
)

from solera.records import PROBE

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
    Column("tokens", Integer, doc="that the run's engine wrote for training, see rows.py; unset in older stores"),
    Column("sequences", LargeBinary, nullable=False, doc="see encoding.py"),
    Column("text", String, doc="the response as it was imported, where its tokens do not spell it"),
    Column("checksum", BigInteger, doc="CRC-32 of sequences"),
    Column("admission", Integer, doc="see Rollout"),
    Column("rewards", Integer, doc="rows in rewards, counted so that a lost one is noticed; unset in older stores"),
    Column("seal", BigInteger, doc="CRC-32 of the other columns, see rows.py; unset in older stores"),
    Column("superseded", Integer, nullable=False, server_default="0", doc="written after the checkpoint resumed from"),
    Column("uses", Integer, nullable=False, server_default="0", doc="rows in uses, counted so that drawing is fast"),
    Column("fingerprint", LargeBinary, doc="digest of what was imported, so that it is not imported twice"),
)

# Literal values, not bound ones: a partial index serves only queries that repeat its condition literally.
to_draw = (
    (rollouts.c.uses == literal_column("0"))
    & (rollouts.c.superseded == literal_column("0"))
    & (rollouts.c.origin != literal_column(f"'{PROBE}'"))
)
Index(
    "rollouts_to_draw", rollouts.c.id, rollouts.c.prompt_key, rollouts.c.admission, sqlite_where=to_draw,
    postgresql_where=to_draw,
)  # fmt: skip
_imported = rollouts.c.fingerprint.is_not(None)
Index(
    "rollouts_imported", rollouts.c.fingerprint, unique=True, sqlite_where=_imported, postgresql_where=_imported
)  # fmt: skip

rewards = Table(
    "rewards",
    metadata,
    Column("rollout_id", ForeignKey("rollouts.id"), primary_key=True),
    Column("part", String, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("value", Float, nullable=False),
    Column("source", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("position", Integer, doc="see Reward"),
    Column("sequence", Integer, doc="see Reward"),
    Column("checksum", BigInteger, doc="CRC-32 of the other columns, see rows.py; unset in older stores"),
    Column("late", Integer, doc="number among the rewards that came after their rollout; unset for those with it"),
    sqlite_with_rowid=False,  # the key is the table: one B-tree to write instead of two
)
_came_later = rewards.c.late.is_not(None)
Index("rewards_late", rewards.c.late, sqlite_where=_came_later, postgresql_where=_came_later)

uses = Table(
    "uses",
    metadata,
    Column("version", Integer, primary_key=True, doc="of the learner, before it learned from this"),
    Column("rollout_id", ForeignKey("rollouts.id"), primary_key=True),
    Column("age", Integer),
    Column("advantage", Float),
    Column("revision", Integer, doc="see Use"),
    Column("group_number", Integer, doc="see Use; unset in older stores"),
    Column("checksum", BigInteger, doc="CRC-32 of the other columns, see rows.py; unset in older stores"),
    sqlite_with_rowid=False,
)
