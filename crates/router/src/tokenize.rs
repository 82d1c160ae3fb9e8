//! The tokens of a request: by the pool's tokenizer, within a budget, off the reactor where it takes long.

mod find;
mod job;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use cairn_tokens::{ChatRequest, ModelTokens, Pipeline, PromptEnd};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::config::PoolConfig;
use crate::error::ApiError;

use find::{find, options_of};
pub(crate) use job::Job;

/// Text up to this length is encoded where the request runs: under 2 ms at the fast encoder's 30 MB/s, cold.
const INLINE_BYTES_FAST: usize = 48 * 1024;
/// The same for the reference encoder at 1 MB/s.
const INLINE_BYTES_REFERENCE: usize = 2 * 1024;
/// Encodes that run beside the reactor at once; further ones wait within their budget.
const BLOCKING_MAX: usize = 4;
/// Longest budget of one request, however long its text.
const BUDGET_MAX: Duration = Duration::from_secs(2);
/// A comparison without outcome is tried again after this long.
const VERIFY_AFTER: Duration = Duration::from_secs(5);
/// A tokenizer that couldn't be loaded is looked for again after this long.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Why tokens aren't known, or not all of them; a label in metrics and decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Degraded {
    /// The budget ran out.
    Budget,
    /// The pool has no tokenizer.
    NoTokenizer,
    /// The chat template or the tokenizer failed on it; the engine will say what is wrong.
    Failed,
    /// The pool's tokenizer gives other ids than its engines.
    Mismatch,
    /// An image, audio or video without a stable identity follows.
    Media,
}

impl Degraded {
    /// Words for people and for closed label sets.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::NoTokenizer => "no_tokenizer",
            Self::Failed => "template",
            Self::Mismatch => "mismatch",
            Self::Media => "media",
        }
    }
}

/// What is known of a request's prompts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tokens {
    /// Ids of each prompt, or of its start.
    pub prompts: Vec<Vec<u32>>,
    /// Why they aren't whole.
    pub degraded: Option<Degraded>,
    /// The text from its start, where there are no tokens.
    pub text: String,
    /// Estimated length in tokens of what isn't tokenised.
    pub estimated_rest: u32,
}

impl Tokens {
    /// Length of all prompts in tokens, estimated where they aren't known.
    pub(crate) fn total(&self) -> u32 {
        let known: usize = self.prompts.iter().map(Vec::len).sum();
        u32::try_from(known)
            .unwrap_or(u32::MAX)
            .saturating_add(self.estimated_rest)
    }
}

/// Bytes of English text and code per token, for estimates.
const BYTES_PER_TOKEN: usize = 4;

/// A pool's tokenizer, once it is found.
pub(crate) struct PoolTokens {
    loaded: ArcSwapOption<ModelTokens>,
    loading: Mutex<()>,
    verified: AtomicU8,
    said: Mutex<Said>,
    /// Measured encoding time in ns per KiB, a running mean.
    ns_per_kib: AtomicU64,
    blocking: Arc<Semaphore>,
}

/// Where a tokenizer is looked for: a configured folder, the engines' root, the models' names.
pub(crate) type Sources = (String, Option<String>, Vec<String>);

/// What is said about a tokenizer to operators, and where and when it was last looked for.
#[derive(Default)]
struct Said {
    text: String,
    sources: Sources,
    at: Option<Instant>,
    compared: Option<Instant>,
}

/// Whether a tokenizer gives the ids that the pool's engines compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Verified {
    /// Not compared yet.
    Unknown = 0,
    /// It does, on the samples.
    Equal = 1,
    /// It doesn't.
    Differs = 2,
    /// The engines don't tell.
    Unsupported = 3,
}

/// Budget of an encode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// For any text.
    pub base: Duration,
    /// Further, for each KiB, at least.
    pub per_kib: Duration,
}

impl Default for PoolTokens {
    fn default() -> Self {
        Self {
            loaded: ArcSwapOption::empty(),
            loading: Mutex::new(()),
            verified: AtomicU8::new(Verified::Unknown as u8),
            said: Mutex::new(Said::default()),
            ns_per_kib: AtomicU64::new(0),
            blocking: Arc::new(Semaphore::new(BLOCKING_MAX)),
        }
    }
}

impl PoolTokens {
    /// What is said about it to operators.
    pub(crate) fn said(&self) -> String {
        let text = self.said.lock().text.clone();
        match self.verified() {
            Verified::Unknown => text,
            Verified::Equal => format!("{text}; gives the engine's ids"),
            Verified::Differs => format!("{text}; gives OTHER ids than the engine and isn't used"),
            Verified::Unsupported => format!("{text}; the engine doesn't tell its ids"),
        }
    }

    /// What a comparison with an engine said.
    pub(crate) fn verified(&self) -> Verified {
        match self.verified.load(Ordering::Acquire) {
            1 => Verified::Equal,
            2 => Verified::Differs,
            3 => Verified::Unsupported,
            _ => Verified::Unknown,
        }
    }

    /// Whether it should be compared (again); true once per period until there is an outcome.
    pub(crate) fn verification_is_due(&self) -> bool {
        let mut said = self.said.lock();
        let due = self.verified() == Verified::Unknown && said.compared.is_none_or(|at| at.elapsed() > VERIFY_AFTER);
        if due {
            said.compared = Some(Instant::now());
        }
        due
    }

    /// Notes what a comparison said.
    pub(crate) fn set_verified(&self, verified: Verified) {
        self.verified.store(verified as u8, Ordering::Release);
    }

    /// Whether it should be looked for (again) at `sources`; true once per period or change.
    pub(crate) fn is_due(&self, sources: &Sources) -> bool {
        if self.loaded.load().is_some() {
            return false;
        }
        let mut said = self.said.lock();
        let due = said.sources != *sources || said.at.is_none_or(|at| at.elapsed() > RETRY_AFTER);
        if due {
            said.at = Some(Instant::now());
            said.sources.clone_from(sources);
        }
        due
    }

    /// Looks for the tokenizer of a model and loads it as `pool` says that its engines were started; blocks on files.
    pub(crate) fn load(&self, configured: &str, root: Option<&str>, models: &[String], pool: &PoolConfig) {
        let _one_at_a_time = self.loading.lock();
        if self.loaded.load().is_some() {
            return;
        }
        let (source, loaded) = match options_of(pool) {
            Ok(options) => find(configured, root, models, &options),
            Err(why) => (String::new(), Err(why)),
        };
        let text = match loaded {
            Ok(tokens) => {
                let said = match tokens.pipeline() {
                    Pipeline::Fast => format!("{source}, fast"),
                    Pipeline::Reference { why } => format!("{source}, reference encoder: {why}"),
                };
                // The first encode pays for tables that later ones find ready.
                let _ = tokens.encode_prompt(&"warm up the tables of the encoder. ".repeat(256), true);
                self.loaded.store(Some(Arc::new(tokens)));
                tracing::info!(tokenizer = said, "a tokenizer was loaded");
                said
            }
            Err(why) => {
                tracing::warn!(why, "no tokenizer: requests are routed by their text");
                why
            }
        };
        self.said.lock().text = text;
    }

    /// The tokenizer, where it is loaded.
    pub(crate) fn get(&self) -> Option<Arc<ModelTokens>> {
        self.loaded.load_full()
    }

    /// How long an encode of `job` may take.
    pub(crate) fn allowed(&self, job: &Job, budget: Budget) -> Duration {
        self.budget(job.bytes(), budget)
    }

    fn budget(&self, bytes: usize, budget: Budget) -> Duration {
        let measured = Duration::from_nanos(self.ns_per_kib.load(Ordering::Relaxed) * 2);
        let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
        (budget.base + budget.per_kib.max(measured).saturating_mul(kib)).min(BUDGET_MAX)
    }

    fn measured(&self, bytes: usize, took: Duration) {
        if bytes >= 4096 {
            let now = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX) / (bytes as u64 / 1024).max(1);
            let mean = self.ns_per_kib.load(Ordering::Relaxed);
            // A lost update of a running mean does no harm.
            self.ns_per_kib
                .store(if mean == 0 { now } else { (mean * 7 + now) / 8 }, Ordering::Relaxed);
        }
    }

    /// Encodes `job` within `budget`. Refuses a prompt that is surely longer than `tokens_max`.
    pub(crate) async fn encode(
        &self,
        job: &Arc<Job>,
        budget: Budget,
        tokens_max: Option<u32>,
    ) -> Result<Tokens, ApiError> {
        let Some(tokens) = self.get() else {
            return Ok(unknown(job, Degraded::NoTokenizer));
        };
        if self.verified() == Verified::Differs {
            return Ok(unknown(job, Degraded::Mismatch));
        }
        let bytes = job.bytes();
        if let Some(max) = tokens_max
            && bytes > tokens.chars_max(max as usize)
            && job.surely_longer_than(&tokens, max as usize)
        {
            let least = bytes / (tokens.chars_max(1)).max(1);
            return Err(too_long(max, &format!("at least {least}")));
        }
        let started = Instant::now();
        let allowed = self.budget(bytes, budget);
        let inline = match tokens.pipeline() {
            Pipeline::Fast => INLINE_BYTES_FAST,
            Pipeline::Reference { .. } => INLINE_BYTES_REFERENCE,
        };
        let done = if bytes <= inline {
            run(&tokens, job, started + allowed)
        } else {
            let done = Box::pin(self.run_beside(tokens, Arc::clone(job), started, allowed)).await;
            done.unwrap_or_else(|| Ok(unknown(job, Degraded::Budget)))
        };
        match done {
            Ok(found) => Ok(self.counted(found, bytes, started)),
            Err(Failed) => Ok(unknown(job, Degraded::Failed)),
        }
    }

    fn counted(&self, found: Tokens, bytes: usize, started: Instant) -> Tokens {
        if found.degraded.is_none() {
            self.measured(bytes, started.elapsed());
        }
        found
    }

    /// On a thread beside the reactor; `None` where it takes longer than allowed (it goes on and fills the caches).
    async fn run_beside(
        &self,
        tokens: Arc<ModelTokens>,
        job: Arc<Job>,
        started: Instant,
        allowed: Duration,
    ) -> Option<Result<Tokens, Failed>> {
        let work = async {
            let permit = Arc::clone(&self.blocking).acquire_owned().await.ok()?;
            tokio::task::spawn_blocking(move || {
                let done = run(&tokens, &job, started + allowed);
                drop(permit);
                done
            })
            .await
            .ok()
        };
        // The encode watches the deadline itself between pieces; this bounds a piece that takes long.
        tokio::time::timeout(allowed + Duration::from_millis(10), work)
            .await
            .ok()
            .flatten()
    }
}

/// A prompt longer than its model allows.
pub(crate) fn too_long(max: u32, has: &str) -> ApiError {
    ApiError::invalid(
        "context_length_exceeded",
        format!(
            "this model's maximum context length is {max} tokens, but the prompt has {has} tokens; shorten the prompt"
        ),
    )
}

fn unknown(job: &Job, why: Degraded) -> Tokens {
    let estimated = job.bytes() / BYTES_PER_TOKEN;
    Tokens {
        prompts: Vec::new(),
        degraded: Some(why),
        text: job.text(),
        estimated_rest: u32::try_from(estimated).unwrap_or(u32::MAX),
    }
}

/// The template or the tokenizer failed. Their words may quote the prompt, so they go nowhere; the engine answers with
/// its own.
struct Failed;

/// The ids of `job`, however long that takes; `None` where the template or the tokenizer fails.
pub(crate) fn ids(tokens: &ModelTokens, job: &Job) -> Option<Vec<Vec<u32>>> {
    run(tokens, job, Instant::now() + BUDGET_MAX)
        .ok()
        .map(|found| found.prompts)
}

fn run(tokens: &ModelTokens, job: &Job, deadline: Instant) -> Result<Tokens, Failed> {
    let mut done = 0;
    let mut go_on = |bytes: usize| {
        done = bytes;
        Instant::now() < deadline
    };
    let mut found = Tokens::default();
    let mut end = PromptEnd::Whole;
    match job {
        Job::Texts { texts, add_special } => {
            for text in texts {
                let prompt = tokens
                    .encode_prompt_within(text, *add_special, &mut go_on)
                    .map_err(|_| Failed)?;
                found.prompts.push(prompt.ids);
                if prompt.end != PromptEnd::Whole {
                    end = prompt.end;
                    break;
                }
            }
        }
        Job::Plain(turns) => {
            let prompt = tokens
                .encode_plain_within(&turns.messages(), &mut go_on)
                .map_err(|_| Failed)?;
            found.prompts.push(prompt.ids);
            end = prompt.end;
        }
        Job::Chat(value) => {
            let request = ChatRequest::from_body(value).map_err(|_| Failed)?;
            let prompt = tokens.encode_chat_within(&request, &mut go_on).map_err(|_| Failed)?;
            found.prompts.push(prompt.ids);
            end = prompt.end;
        }
    }
    found.degraded = match end {
        PromptEnd::Whole => None,
        PromptEnd::Media => Some(Degraded::Media),
        PromptEnd::Budget => Some(Degraded::Budget),
    };
    if found.degraded.is_some() {
        found.estimated_rest = u32::try_from(job.bytes().saturating_sub(done) / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::find::EMBEDDED_ROOT;
    use super::*;

    fn chat(json: &str) -> Job {
        Job::Chat(serde_json::from_str(json).unwrap())
    }

    #[tokio::test]
    async fn prompts_are_encoded_inline_or_beside_the_reactor_alike() {
        let slot = PoolTokens::default();
        slot.load(EMBEDDED_ROOT, None, &[], &PoolConfig::default());
        let budget = Budget {
            base: Duration::from_secs(1),
            per_kib: Duration::from_millis(1),
        };
        let text = "a prefix that many requests share, and words. ".repeat(2_000);
        let tokens = slot.get().unwrap();
        let want = tokens.encode_prompt(&text, true).unwrap();
        let job = Job::Texts {
            texts: vec![text],
            add_special: true,
        };
        let got = slot.encode(&Arc::new(job), budget, None).await.unwrap();
        assert_eq!(got.prompts, [want]);
        assert_eq!(got.degraded, None);
    }

    #[tokio::test]
    async fn a_prompt_far_too_long_is_refused_by_its_length_alone() {
        let slot = PoolTokens::default();
        slot.load(EMBEDDED_ROOT, None, &[], &PoolConfig::default());
        let budget = Budget {
            base: Duration::from_millis(50),
            per_kib: Duration::from_micros(400),
        };
        let job = chat(&format!(
            r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#,
            "x".repeat(16 << 20)
        ));
        let error = slot.encode(&Arc::new(job), budget, Some(4096)).await.unwrap_err();
        assert_eq!(error.code, "context_length_exceeded");
        assert!(error.message.contains("4096") && error.message.contains("at least"));
    }
}
