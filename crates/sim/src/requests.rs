//! Clients: prompts that share starts, salts of two tenants, aborts, and clients that try again.

use std::rc::Rc;

use cairn_index::WorkerId;
use cairn_routing::Ending;

use crate::model::Event;
use crate::world::World;

/// Families of prompts; each shares a start.
const FAMILIES: u64 = 12;

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// No worker could take it yet.
    Waiting,
    /// On its way to an engine, or in it.
    Sent,
    /// Its first token came.
    Streaming,
    /// Done.
    Answered,
    /// Given up.
    Failed,
    /// Its client went.
    Aborted,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Rc<Vec<u32>>,
    pub(crate) salt: Option<Rc<str>>,
    pub(crate) answer: u32,
    pub(crate) router: usize,
    pub(crate) stage: Stage,
    /// Counts sends, over all routers.
    pub(crate) attempt: u32,
    /// Sends before the present router got it.
    before: u32,
    pub(crate) engine: usize,
    pub(crate) worker: Option<WorkerId>,
    pub(crate) predicted: u32,
    pub(crate) excluded: Vec<WorkerId>,
    pub(crate) waits: u32,
}

impl Request {
    pub(crate) fn answered(&self) -> bool {
        self.stage == Stage::Answered
    }

    pub(crate) fn failed(&self) -> bool {
        self.stage == Stage::Failed
    }

    pub(crate) fn aborted(&self) -> bool {
        self.stage == Stage::Aborted
    }

    /// Counts as load in its router.
    pub(crate) fn reserved(&self) -> bool {
        matches!(self.stage, Stage::Sent | Stage::Streaming)
    }

    /// Attempts that its present router made.
    pub(crate) fn attempts_here(&self) -> u32 {
        self.attempt - self.before
    }
}

impl World {
    /// A client's next request, or one that waited for a worker.
    pub(crate) fn arrive(&mut self, request: usize) {
        if request < self.requests.len() {
            if self.requests[request].stage == Stage::Waiting {
                self.hand_to_router(request);
            }
            return;
        }
        let made = self.draw_request();
        self.requests.push(made);
        let last = 1_000_000 + (self.plan.end_ms - 5_000) * 1_000;
        let every = if self.calm {
            self.plan.request_every_us * 2
        } else {
            self.plan.request_every_us
        };
        let next = self.rng.range(1_000, every * 2);
        if self.now + next < last {
            self.after(next, Event::Arrive { request: request + 1 });
        }
        self.note(
            "request comes",
            &[request as u64, self.requests[request].prompt.len() as u64],
        );
        self.hand_to_router(request);
        if self.rng.percent(6) {
            let span = self.rng.range(1_000, 400_000);
            self.after(span, Event::Abort { request });
        }
    }

    fn draw_request(&mut self) -> Request {
        let family = self.rng.range(0, FAMILIES);
        let shared = 40 + family * 37;
        let own = self.rng.range(0, 5);
        let tail = self.rng.range(1, 120);
        // Few own parts, so that whole prompts come again.
        let token = |family: u64, own: u64, at: u64| (family * 100_000 + own * 1_000 + at) as u32;
        let mut prompt: Vec<u32> = (0..shared).map(|at| token(family, 0, at)).collect();
        prompt.extend((0..tail).map(|at| token(family, own + 1, at)));
        let salt = match self.rng.range(0, 4) {
            0 => Some(Rc::from("tenant-a")),
            1 => Some(Rc::from("tenant-b")),
            _ => None,
        };
        let prompt = Rc::new(prompt);
        if self.asked.len() < 400 {
            self.asked.push((Rc::clone(&prompt), salt.clone()));
        }
        Request {
            prompt,
            salt,
            answer: self.rng.range(1, 12) as u32,
            router: self.rng.index(self.plan.routers),
            stage: Stage::Waiting,
            attempt: 0,
            before: 0,
            engine: 0,
            worker: None,
            predicted: 0,
            excluded: Vec::new(),
            waits: 0,
        }
    }

    /// The client asks a router that answers.
    fn hand_to_router(&mut self, request: usize) {
        let routers = self.plan.routers;
        let first = self.requests[request].router;
        let Some(router) = (0..routers)
            .map(|i| (first + i) % routers)
            .find(|r| self.routers[*r].up)
        else {
            let asked = &mut self.requests[request];
            asked.waits += 1;
            if asked.waits > 60 {
                asked.stage = Stage::Failed;
            } else {
                self.after(200_000, Event::Arrive { request });
            }
            return;
        };
        let now = self.us();
        self.requests[request].router = router;
        if self.requests[request].attempt == self.requests[request].before {
            self.routers[router].budget.on_request(now);
        }
        self.route(request);
    }

    pub(crate) fn abort(&mut self, request: usize) {
        if !self.requests[request].reserved() {
            return;
        }
        self.note("client aborts", &[request as u64]);
        self.give_back(request, Ending::Cancelled);
        let asked = &mut self.requests[request];
        asked.stage = Stage::Aborted;
        let (engine, attempt) = (asked.engine, asked.attempt);
        // Whatever the engine still says of it concerns nobody.
        asked.attempt += 1;
        self.hang_up(engine, request, attempt);
    }

    /// The router of a request died: before its first byte the client asks another one.
    pub(crate) fn cut_by_router(&mut self, request: usize) {
        let asked = &mut self.requests[request];
        let (engine, attempt) = (asked.engine, asked.attempt);
        let streaming = asked.stage == Stage::Streaming;
        asked.stage = if streaming { Stage::Failed } else { Stage::Waiting };
        asked.attempt += 1;
        asked.before = asked.attempt;
        asked.excluded.clear();
        self.hang_up(engine, request, attempt);
        if !streaming {
            self.after(50_000, Event::Arrive { request });
        }
    }
}
