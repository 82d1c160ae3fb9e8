//! Events of the world and the messages between its processes.

use std::rc::Rc;

use cairn_index::{Batch, BatchOutcome, HolderId, Incarnation, RegisterOutcome, Seq, SourceId, SourceSpec, WorkerId};
use cairn_ingest::{EventBatch, HolderAudit};
use cairn_routing::{LoadReport, RouterFrame};

/// One lifetime of a process; messages to an older one are lost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Life(pub(crate) u64);

/// Where a message of an agent came from, and where its answer goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FromAgent {
    pub(crate) agent: usize,
    pub(crate) life: Life,
    /// The connection: answers on an older one are lost.
    pub(crate) conn: u64,
}

/// What agents say to index nodes.
#[derive(Clone, Debug)]
pub(crate) enum ToNode {
    Register {
        from: FromAgent,
        spec: Box<SourceSpec>,
        resume: Option<Incarnation>,
    },
    Push {
        from: FromAgent,
        batches: Vec<Batch>,
        renew: Option<(SourceId, Incarnation)>,
    },
    Audit {
        from: FromAgent,
        source: SourceId,
        incarnation: Incarnation,
    },
}

/// What index nodes say to agents.
#[derive(Clone, Debug)]
pub(crate) enum ToAgent {
    Registered(RegisterOutcome),
    Acks(Vec<(SourceId, Incarnation, Seq, BatchOutcome)>),
    Audit {
        seq: Seq,
        incarnation: Incarnation,
        holders: Vec<HolderAudit>,
    },
}

/// What a node's feed says to a router.
#[derive(Clone, Debug)]
pub(crate) enum FeedFrame {
    Snapshot { index: u64, bytes: Rc<Vec<u8>> },
    Entries(Vec<(u64, Rc<Vec<u8>>)>),
    Idle,
}

/// A request on its way to an engine.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) request: usize,
    /// Counts its attempts, so that answers of an older one are told apart.
    pub(crate) attempt: u32,
    pub(crate) router: usize,
    pub(crate) router_life: Life,
}

/// What an engine says of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Token,
    Done { cached_tokens: u32 },
    Failed,
    PushedBack,
}

/// What a replay socket answers.
#[derive(Clone, Debug)]
pub(crate) enum Replay {
    Batch(Rc<EventBatch>),
    End,
    Failed,
}

/// Everything that can be due.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    EngineWake {
        engine: usize,
        life: Life,
    },
    EngineRevive {
        engine: usize,
        life: Life,
    },
    EngineReceive {
        engine: usize,
        life: Life,
        sent: Sent,
    },
    EngineCancel {
        engine: usize,
        life: Life,
        id: u64,
    },
    LiveBatch {
        agent: usize,
        life: Life,
        conn: u64,
        batch: Rc<EventBatch>,
    },
    ReplayRequest {
        agent: usize,
        life: Life,
        conn: u64,
        from: u64,
    },
    ReplayAnswer {
        agent: usize,
        life: Life,
        conn: u64,
        answer: Replay,
    },
    AgentRevive {
        agent: usize,
        life: Life,
    },
    AgentTick {
        agent: usize,
        life: Life,
    },
    AgentPoll {
        agent: usize,
        life: Life,
    },
    AgentConnect {
        agent: usize,
        life: Life,
    },
    AgentRegister {
        agent: usize,
        life: Life,
    },
    AgentReceive {
        agent: usize,
        life: Life,
        conn: u64,
        message: ToAgent,
    },
    NodeReceive {
        node: usize,
        message: Box<ToNode>,
    },
    LeaderReceive {
        term: u64,
        message: Box<ToNode>,
    },
    LeaderFlush {
        term: u64,
    },
    Commit {
        term: u64,
        entry: u64,
    },
    NodeApply {
        node: usize,
        life: Life,
    },
    NodeRevive {
        node: usize,
        life: Life,
    },
    NodeIdle {
        node: usize,
        life: Life,
    },
    NodeSnapshot {
        node: usize,
        life: Life,
    },
    Elect {
        term: u64,
    },
    LeaseCheck {
        term: u64,
    },
    Heal {
        node: usize,
    },
    RouterRevive {
        router: usize,
        life: Life,
    },
    RouterFollow {
        router: usize,
        life: Life,
    },
    RouterReceive {
        router: usize,
        life: Life,
        conn: u64,
        frame: FeedFrame,
        quorum_age_us: u64,
    },
    RouterTick {
        router: usize,
        life: Life,
    },
    SoftRouter {
        router: usize,
        life: Life,
        frame: Rc<RouterFrame>,
    },
    SoftLoad {
        router: usize,
        life: Life,
        source: usize,
        report: LoadReport,
    },
    Arrive {
        request: usize,
    },
    Abort {
        request: usize,
    },
    RouterAnswer {
        sent: Sent,
        answer: Answer,
    },
    Undrain {
        worker: WorkerId,
    },
    Fault,
    Calm,
    Check,
}

/// The holders of a registration that may be gone by now, for INV-06.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) worker: WorkerId,
    pub(crate) source: SourceId,
    pub(crate) holders: Vec<HolderId>,
}
