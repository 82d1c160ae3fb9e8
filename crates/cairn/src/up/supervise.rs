//! Starts the children in order, keeps them alive, and ends them in the reverse order.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{FuturesUnordered, StreamExt};

use super::child::{ChildSpec, Running, tail};
use super::plan::Plan;
use super::report;
use crate::output;
use crate::signals::Ends;

/// Each child's time to end by itself; routers finish their streams in the 30 s that a role gives itself, and a little is left
/// for the rest. A second signal ends the waiting.
const STOP_GRACE: Duration = Duration::from_secs(35);
/// Pause before a dead child is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(500);
/// Restarts of one child within [`RESTART_WINDOW`] after which the whole cluster is given up.
const RESTARTS_MAX: usize = 10;
/// Window of [`RESTARTS_MAX`].
const RESTART_WINDOW: Duration = Duration::from_secs(60);

type Watch = Pin<Box<dyn Future<Output = (usize, anyhow::Result<Running>)>>>;

/// A signal that came before the cluster was wholly there; nothing went wrong.
#[derive(Debug)]
struct EndedEarly {
    signal: &'static str,
    before: &'static str,
}

impl std::fmt::Display for EndedEarly {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} came before the cluster was {}", self.signal, self.before)
    }
}

impl std::error::Error for EndedEarly {}

/// Runs the cluster until a signal; a temporary directory outlives a failure alone.
pub async fn run(plan: Plan, json: bool) -> anyhow::Result<()> {
    let outcome = serve(&plan, json).await;
    match &outcome {
        Err(error) if !error.is::<EndedEarly>() => plan.keep(),
        Ok(()) | Err(_) => plan.clean_up(),
    }
    outcome
}

async fn serve(plan: &Plan, json: bool) -> anyhow::Result<()> {
    let mut ends = Ends::listen(false).context("listening for signals")?;
    let begun = Instant::now();
    let outcome = tokio::select! {
        up = start_all(plan) => up,
        signal = ends.next() => Err(EndedEarly { signal, before: "up" }.into()),
    };
    let children = outcome?;
    tokio::select! {
        ready = report::wait_until_serving(plan, &children) => ready?,
        signal = ends.next() => {
            stop_all(children.into_iter().map(Some).collect()).await;
            let before = "serving";
            return Err(EndedEarly { signal, before }.into());
        }
    }
    let model = report::served_model(plan).await;
    report::print(plan, &children, &model, begun.elapsed(), json);
    keep_alive(children, &mut ends).await
}

async fn start_all(plan: &Plan) -> anyhow::Result<Vec<Running>> {
    let mut running = Vec::new();
    // Index nodes need each other to elect a leader, engines and routers need nothing: each wave starts side by side.
    for wave in plan.waves() {
        let started = futures::future::join_all(wave.into_iter().map(Running::start)).await;
        for child in started {
            running.push(child?);
        }
    }
    Ok(running)
}

/// Watches all children; ends when asked to, or when one can't be kept alive.
async fn keep_alive(children: Vec<Running>, ends: &mut Ends) -> anyhow::Result<()> {
    let mut restarts: Vec<Vec<Instant>> = vec![Vec::new(); children.len()];
    let stopping = tokio_util::sync::CancellationToken::new();
    let mut watches: FuturesUnordered<Watch> = FuturesUnordered::new();
    for (slot, child) in children.into_iter().enumerate() {
        watches.push(Box::pin(watch(slot, child, stopping.clone())));
    }
    let outcome = loop {
        tokio::select! {
            signal = ends.next() => {
                output::note(format!("{signal}: ending"));
                break Ok(());
            }
            Some((slot, restarted)) = watches.next() => {
                let child = match restarted {
                    Ok(child) => child,
                    Err(error) => break Err(error),
                };
                let recent = &mut restarts[slot];
                recent.retain(|at| at.elapsed() < RESTART_WINDOW);
                recent.push(Instant::now());
                if recent.len() > RESTARTS_MAX {
                    let error = anyhow::anyhow!("{} keeps dying:\n{}", child.spec.name, tail(&child.spec.log));
                    watches.push(Box::pin(watch(slot, child, stopping.clone())));
                    break Err(error);
                }
                output::note(format!("{} is up again (pid {})", child.spec.name, child.pid().unwrap_or_default()));
                watches.push(Box::pin(watch(slot, child, stopping.clone())));
            }
        }
    };
    stopping.cancel();
    let mut left: Vec<Option<Running>> = (0..restarts.len()).map(|_| None).collect();
    while let Some((slot, child)) = watches.next().await {
        if let Ok(child) = child {
            left[slot] = Some(child);
        }
    }
    let force = async { ends.next().await };
    tokio::select! {
        () = stop_all(left) => {}
        signal = force => output::note(format!("{signal} again: killing what is left")),
    }
    outcome
}

/// Resolves with the child's successor after it died, or with itself once `stopping`.
async fn watch(
    slot: usize,
    mut child: Running,
    stopping: tokio_util::sync::CancellationToken,
) -> (usize, anyhow::Result<Running>) {
    let how = tokio::select! {
        how = child.ended() => how,
        () = stopping.cancelled() => return (slot, Ok(child)),
    };
    output::note(format!("{} ended ({how}); starting it again", child.spec.name));
    let spec: ChildSpec = child.spec.clone();
    drop(child);
    tokio::select! {
        () = tokio::time::sleep(RESTART_PAUSE) => {}
        () = stopping.cancelled() => return (slot, Err(anyhow::anyhow!("{} was down at the end", spec.name))),
    }
    (slot, Running::start(spec).await)
}

/// Ends routers first, engines last, each kind side by side.
async fn stop_all(mut children: Vec<Option<Running>>) {
    for role in ["router", "agent", "index", "engine"] {
        let wave: Vec<Running> = children
            .iter_mut()
            .filter_map(|slot| slot.take_if(|child| child.spec.role == role))
            .collect();
        futures::future::join_all(wave.into_iter().map(|child| async move {
            let name = child.spec.name.clone();
            if !child.stop(STOP_GRACE).await {
                output::note(format!("{name} did not end within {STOP_GRACE:?} and was killed"));
            }
        }))
        .await;
    }
}
