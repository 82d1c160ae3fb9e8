//! When a process is asked to end: SIGINT, SIGTERM or, for children of `cairn up`, the end of standard input.

use std::io::Read;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

/// How the end of standard input is named.
const PARENT_GONE: &str = "the end of standard input";

/// Waits for requests to end.
pub struct Ends {
    interrupt: Signal,
    terminate: Signal,
    parent: Option<mpsc::Receiver<()>>,
}

impl Ends {
    /// Starts to listen; `with_parent` also takes the end of standard input as a request.
    pub fn listen(with_parent: bool) -> std::io::Result<Self> {
        let parent = with_parent.then(|| {
            let (ended, gone) = mpsc::channel(1);
            std::thread::spawn(move || {
                let mut buffer = [0u8; 256];
                while matches!(std::io::stdin().lock().read(&mut buffer), Ok(n) if n > 0) {}
                // The receiver may have gone first; then the process is ending anyway.
                let _ = ended.blocking_send(());
            });
            gone
        });
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            parent,
        })
    }

    /// Resolves at the next request, naming it.
    pub async fn next(&mut self) -> &'static str {
        let parent = async {
            match &mut self.parent {
                Some(gone) => gone.recv().await,
                None => std::future::pending().await,
            }
        };
        let request = tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = parent => PARENT_GONE,
        };
        if request == PARENT_GONE {
            // It ends once: the next request is a signal.
            self.parent = None;
        }
        request
    }
}
