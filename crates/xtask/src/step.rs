//! One step of a task: a command with a name, timed, that stops the task when it fails.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Names and durations of the steps that ran.
#[derive(Default)]
pub struct Steps {
    done: Vec<(String, Duration)>,
}

impl Steps {
    /// Runs `command`; the error names the step.
    pub fn run(&mut self, name: &str, command: &mut Command) -> anyhow::Result<()> {
        self.time(name, || {
            let status = command
                .status()
                .with_context(|| format!("{name}: starting {:?}", command.get_program()))?;
            if !status.success() {
                bail!("{name} failed ({status})");
            }
            Ok(())
        })
    }

    /// Runs `work` as a step.
    pub fn time(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        say(&format!("==> {name}"));
        let begun = Instant::now();
        work()?;
        self.done.push((name.to_owned(), begun.elapsed()));
        Ok(())
    }

    /// Prints what took how long.
    pub fn summary(&self) {
        say("==> steps");
        for (name, took) in &self.done {
            say(&format!("{:>8.1} s  {name}", took.as_secs_f64()));
        }
    }
}

/// Prints one line of progress.
pub fn say(text: &str) {
    use std::io::Write;
    // A closed pipe must not end the checks.
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// `cargo` in the workspace's folder.
pub fn cargo(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(args);
    command
}
