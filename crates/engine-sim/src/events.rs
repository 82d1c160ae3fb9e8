//! KV events on the wire: shapes of every engine version, the publisher and its replay socket.

mod encode;
mod publisher;
mod replay;
mod wire;

pub use encode::{Encoder, HashForm};
pub(crate) use publisher::{Losses, Publisher, PublisherSetup};
pub use replay::ReplayBuffer;
pub use wire::Wire;
