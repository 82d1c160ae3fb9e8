//! What one seed plays: sizes of the fleet, shape of the traffic, and which faults come.

use crate::rng::Rng;

/// A mistake that is built in on purpose, to prove that the invariants see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// One index node leaves out a command now and then (INV-01).
    NodeSkipsCommand,
    /// A router's view loses a batch of the feed (INV-02).
    ViewSkipsEntry,
    /// Snapshots claim to be one entry further than they are (INV-03).
    SnapshotClaimsMore,
    /// The leader acknowledges batches before they are committed (INV-04).
    AckBeforeCommit,
    /// Batches of an older lifetime are taken as if they were of the present one (INV-05).
    NoFencing,
    /// A removed source leaves its blocks behind under a name that goes on (INV-06).
    RemovalForgotten,
    /// The router credits one token more than the prompt has (INV-07).
    OverlapExceedsPrompt,
    /// The agent doesn't notice that an engine began a new life (INV-08).
    RestartUnnoticed,
    /// A router counts every worker as ineligible while its view is stale (INV-10).
    StaleViewRefuses,
    /// An aborted request is never given back (INV-13).
    AbortLeaks,
    /// A request that ends is given back twice: its twin's reservation goes with it (INV-13).
    DoubleRelease,
    /// Agent and router both leave the salt out of the keys (INV-14).
    SaltIgnored,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::NodeSkipsCommand,
        Self::ViewSkipsEntry,
        Self::SnapshotClaimsMore,
        Self::AckBeforeCommit,
        Self::NoFencing,
        Self::RemovalForgotten,
        Self::OverlapExceedsPrompt,
        Self::RestartUnnoticed,
        Self::StaleViewRefuses,
        Self::AbortLeaks,
        Self::DoubleRelease,
        Self::SaltIgnored,
    ];
}

/// From the last fault to the end of a run. The longest wait that a fault leaves behind is an agent's for a replay whose
/// answer was lost, 15 s; what it then asks again must have arrived and been acknowledged.
const SETTLING_MS: u64 = 17_000;

/// See the module.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// Engines, each with one agent.
    pub engines: usize,
    /// Index nodes.
    pub nodes: usize,
    /// Routers.
    pub routers: usize,
    /// GPU blocks of an engine.
    pub gpu_blocks: u32,
    /// Blocks of its CPU tier; 0 for none.
    pub cpu_blocks: u32,
    /// Batches that an engine's replay socket still has.
    pub replay_kept: usize,
    /// Whether engines have a replay socket.
    pub replay: bool,
    /// When faults end and everything heals, in milliseconds.
    pub faults_end_ms: u64,
    /// When the run ends.
    pub end_ms: u64,
    /// Mean time between requests in microseconds.
    pub request_every_us: u64,
    /// Mean time between faults in milliseconds; 0 for none.
    pub fault_every_ms: u64,
    /// Part of live event messages that is lost, in percent.
    pub event_loss_percent: u64,
    /// Part of soft frames that is lost, in percent.
    pub soft_loss_percent: u64,
    /// Longest network delay in microseconds.
    pub delay_us_max: u64,
    /// A mistake to build in.
    pub bug: Option<Bug>,
    /// Whether the trace's lines are kept.
    pub keep_trace: bool,
}

impl Plan {
    /// Draws a plan from a seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x0070_6c61_6e00);
        let faults_end_ms = rng.range(4_000, 7_000);
        Self {
            seed,
            engines: rng.range(2, 5) as usize,
            nodes: 3,
            routers: rng.range(1, 4) as usize,
            gpu_blocks: rng.range(60, 260) as u32,
            cpu_blocks: if rng.percent(40) { rng.range(100, 300) as u32 } else { 0 },
            replay_kept: if rng.percent(30) {
                rng.range(3, 40) as usize
            } else {
                10_000
            },
            replay: rng.percent(85),
            faults_end_ms,
            end_ms: faults_end_ms + SETTLING_MS,
            request_every_us: rng.range(20_000, 80_000),
            fault_every_ms: rng.range(150, 900),
            event_loss_percent: if rng.percent(50) { rng.range(1, 15) } else { 0 },
            soft_loss_percent: if rng.percent(50) { rng.range(1, 40) } else { 0 },
            delay_us_max: [500, 3_000, 20_000][rng.index(3)],
            bug: None,
            keep_trace: false,
        }
    }

    /// The same with a mistake built in.
    #[must_use]
    pub fn with_bug(mut self, bug: Bug) -> Self {
        self.bug = Some(bug);
        self
    }

    /// The same with the trace's lines kept.
    #[must_use]
    pub fn traced(mut self) -> Self {
        self.keep_trace = true;
        self
    }
}
