//! Dynamo's indexes: the radix tree, the positional index and the compressed concurrent radix tree.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread::JoinHandle;

use dynamo_kv_router::indexer::positional::LevelIndex;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};
use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

use crate::clock::CpuClock;
use crate::contender::Contender;
use crate::log::{BlockId, Event, Log, NONE};

/// Positions that the positional index jumps over, as its own benchmarks do.
const JUMP: usize = 8;

fn router_events(log: &Log, events: &[Event]) -> Vec<RouterEvent> {
    let engine = |id: BlockId| ExternalSequenceBlockHash(log.blocks.engine[id as usize]);
    let convert = |event: &Event| {
        let (worker, data) = match *event {
            Event::Store { worker, blocks } => {
                let ids = log.span(blocks);
                let above = log.blocks.parent[ids[0] as usize];
                let blocks = ids.iter().map(|id| KvCacheStoredBlockData {
                    block_hash: engine(*id),
                    tokens_hash: LocalBlockHash(log.blocks.content(*id)),
                    mm_extra_info: None,
                });
                let data = KvCacheStoreData {
                    parent_hash: (above != NONE).then(|| engine(above)),
                    start_position: None,
                    blocks: blocks.collect(),
                };
                (worker, KvCacheEventData::Stored(data))
            }
            Event::Remove { worker, blocks } => {
                let block_hashes = log.span(blocks).iter().map(|id| engine(*id)).collect();
                (worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
            }
            Event::Match { .. } => return None,
        };
        let event = KvCacheEvent {
            event_id: 0,
            data,
            dp_rank: 0,
        };
        Some(RouterEvent::new(u64::from(worker), event))
    };
    events.iter().filter_map(convert).collect()
}

fn local_hashes(log: &Log, prompt: &[BlockId]) -> Vec<LocalBlockHash> {
    prompt
        .iter()
        .map(|id| LocalBlockHash(log.blocks.content(*id)))
        .collect()
}

fn pairs(scores: &OverlapScores, out: &mut Vec<(u32, u32)>) {
    out.extend(
        scores
            .scores
            .iter()
            .map(|(worker, score)| (worker.worker_id as u32, *score)),
    );
}

/// The single-threaded radix tree.
pub struct Radix {
    tree: RadixTree,
    found: OverlapScores,
    refused: u64,
}

impl Contender for Radix {
    type Batch = Vec<RouterEvent>;
    type Query = Vec<LocalBlockHash>;
    type Key = LocalBlockHash;

    fn new(_: &Log) -> Self {
        Self {
            tree: RadixTree::new(),
            found: OverlapScores::new(),
            refused: 0,
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        router_events(log, events)
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        for event in batch.drain(..) {
            // As its own service does: what it refuses is passed over.
            self.refused += u64::from(self.tree.apply_event(event).is_err());
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Self::Query {
        local_hashes(log, prompt)
    }

    fn keys(query: &Self::Query) -> &[LocalBlockHash] {
        query
    }

    fn find(&mut self, query: &mut Self::Query) {
        self.found = self.tree.find_matches(std::mem::take(query), false);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        pairs(&self.found, out);
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

/// The positional index.
pub struct Positional {
    index: PositionalIndexer,
    lookup: FxHashMap<WorkerWithDpRank, LevelIndex>,
    found: OverlapScores,
    refused: u64,
}

impl Contender for Positional {
    type Batch = Vec<RouterEvent>;
    type Query = Vec<LocalBlockHash>;
    type Key = LocalBlockHash;

    fn new(_: &Log) -> Self {
        Self {
            index: PositionalIndexer::new(JUMP),
            lookup: FxHashMap::default(),
            found: OverlapScores::new(),
            refused: 0,
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        router_events(log, events)
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        for event in batch.drain(..) {
            let applied = self.index.apply_event(&mut self.lookup, event, None);
            self.refused += u64::from(applied.is_err());
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Self::Query {
        local_hashes(log, prompt)
    }

    fn keys(query: &Self::Query) -> &[LocalBlockHash] {
        query
    }

    fn find(&mut self, query: &mut Self::Query) {
        self.found = self.index.find_matches(query, false);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        pairs(&self.found, out);
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

/// Holds the index's own thread while a batch is put into its queue, so that it then runs without waiting.
#[derive(Default)]
struct Gate {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Gate {
    fn wait_reached(&self) {
        let mut state = self.state.lock().expect("no thread panics at the gate");
        while !state.0 {
            state = self.changed.wait(state).expect("no thread panics at the gate");
        }
    }

    fn open(&self) {
        self.state.lock().expect("no thread panics at the gate").1 = true;
        self.changed.notify_all();
    }
}

impl Wake for Gate {
    /// Called on the index's thread when it answers the flush that this gate hangs on: waits until it is opened.
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock().expect("no thread panics at the gate");
        state.0 = true;
        self.changed.notify_all();
        while !state.1 {
            state = self.changed.wait(state).expect("no thread panics at the gate");
        }
    }
}

/// A flush whose answer holds the index's thread.
struct Held {
    gate: Arc<Gate>,
    _answer: Pin<Box<oneshot::Receiver<()>>>,
}

/// The compressed concurrent radix tree, whose events only its own thread can apply; it is asked from ours.
pub struct Compressed {
    index: Arc<ConcurrentRadixTreeCompressed>,
    queue: Option<flume::Sender<WorkerTask>>,
    thread: Option<JoinHandle<()>>,
    clock: CpuClock,
    held: Option<Held>,
    found: OverlapScores,
}

impl Compressed {
    fn send(&self, task: WorkerTask) {
        let queue = self.queue.as_ref().expect("the queue lives as long as the index");
        assert!(queue.send(task).is_ok(), "the index's thread has ended");
    }

    /// Asks for a flush whose answer stops the thread at a gate, and waits until it is there.
    fn hold(&mut self) {
        let gate = Arc::new(Gate::default());
        let (sender, receiver) = oneshot::channel();
        let mut answer = Box::pin(receiver);
        let waker = Waker::from(Arc::clone(&gate));
        assert!(answer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        self.send(WorkerTask::Flush(sender));
        let before = self.held.take();
        if let Some(before) = before {
            before.gate.open();
        }
        gate.wait_reached();
        self.held = Some(Held { gate, _answer: answer });
    }
}

impl Contender for Compressed {
    type Batch = Vec<RouterEvent>;
    type Query = Vec<LocalBlockHash>;
    type Key = LocalBlockHash;

    fn new(_: &Log) -> Self {
        let index = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (queue, tasks) = flume::unbounded();
        let (tell, told) = std::sync::mpsc::channel();
        let own = Arc::clone(&index);
        let thread = std::thread::spawn(move || {
            let _ = tell.send(CpuClock::this_thread());
            own.worker(tasks, None).expect("the index's thread runs to its end");
        });
        let clock = told.recv().expect("the thread has begun");
        let mut this = Self {
            index,
            queue: Some(queue),
            thread: Some(thread),
            clock,
            held: None,
            found: OverlapScores::new(),
        };
        this.hold();
        this
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        for event in router_events(log, events) {
            self.send(WorkerTask::Event(event));
        }
        Vec::new()
    }

    fn ingest(&mut self, _: &mut Self::Batch) {
        self.hold();
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Self::Query {
        local_hashes(log, prompt)
    }

    fn keys(query: &Self::Query) -> &[LocalBlockHash] {
        query
    }

    fn find(&mut self, query: &mut Self::Query) {
        self.found = self.index.find_matches(query, false);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        pairs(&self.found, out);
    }

    fn clock(&self) -> CpuClock {
        self.clock
    }
}

impl Drop for Compressed {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            held.gate.open();
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
