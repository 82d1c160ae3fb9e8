//! Who holds how much of a run: a few shares in place, a sorted list, or a row of ends by holder where ids lie close.

use super::row::Row;
use crate::HolderId;

/// A holder's share of a run: it holds the offsets below `cut`, apart from holes kept elsewhere.
///
/// The block just below `cut` is held always. Packed as holder, flag and cut from the high bits down, so that shares
/// sort by holder. No share is all zeros, as none is cut at 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Share(u64);

/// Marks ends below which something is missing, in shares and in rows.
pub(super) const HOLES: u32 = 1 << 31;

impl Share {
    const NONE: Share = Share(0);

    pub(super) fn new(holder: HolderId, cut: u32, holes: bool) -> Self {
        debug_assert!(cut > 0 && cut < HOLES);
        Self::of_end(holder, if holes { HOLES | cut } else { cut })
    }

    /// From a cut with its flag.
    #[inline]
    pub(super) fn of_end(holder: HolderId, end: u32) -> Self {
        Self(u64::from(holder.0) << 32 | u64::from(end))
    }

    /// The cut with its flag.
    #[inline]
    pub(super) fn end(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn holder(self) -> HolderId {
        HolderId((self.0 >> 32) as u32)
    }

    #[inline]
    pub(super) fn cut(self) -> u32 {
        self.end() & !HOLES
    }

    /// Whether it is that holder's, and there.
    #[inline(always)]
    fn is_of(self, holder: HolderId) -> bool {
        self.holder() == holder && self != Self::NONE
    }

    /// Whether there are holes below the cut.
    #[inline]
    pub(super) fn holes(self) -> bool {
        self.end() & HOLES != 0
    }
}

/// The shares of one run.
#[derive(Clone, Debug)]
pub(super) enum Shares {
    /// Up to two, from the front.
    Few([Share; 2]),
    /// More, by holder.
    List(Vec<Share>),
    /// By holder id, where a good part of a span of ids has a share.
    Row(Row),
}

const _: () = assert!(
    size_of::<Shares>() == 24,
    "the list's capacity has room for what tells the others"
);

/// Lists up to this number are looked through one by one.
const LINEAR: usize = 12;
/// A list of so many becomes a row where its ids span at most [`SPAN_OF_ROW`] for each of them: the row is no larger then.
const ROW_LEAST: usize = 8;
const SPAN_OF_ROW: usize = 2;

impl Default for Shares {
    fn default() -> Self {
        Self::Few([Share::NONE; 2])
    }
}

impl Shares {
    /// Those that aren't in a row.
    #[inline]
    fn list(&self) -> &[Share] {
        match self {
            Self::Few(few) => match few {
                [Share::NONE, _] => &[],
                [_, Share::NONE] => &few[..1],
                _ => few,
            },
            Self::List(list) => list,
            Self::Row(_) => &[],
        }
    }

    /// The row, if they are in one.
    #[inline]
    pub(super) fn row(&self) -> Option<&Row> {
        match self {
            Self::Row(row) => Some(row),
            Self::Few(_) | Self::List(_) => None,
        }
    }

    /// All, by holder.
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = Share> + '_ {
        let row = self.row().into_iter().flat_map(Row::iter);
        self.list().iter().copied().chain(row)
    }

    pub(super) fn len(&self) -> usize {
        self.row().map_or_else(|| self.list().len(), Row::len)
    }

    /// Bytes that lie outside the struct.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::List(list) => list.capacity() * size_of::<Share>(),
            Self::Row(row) => row.bytes(),
        }
    }

    /// The holder's share.
    #[inline(always)]
    pub(super) fn find(&self, holder: HolderId) -> Option<Share> {
        let Self::Few([one, two]) = self else {
            return self.find_among_many(holder);
        };
        if one.is_of(holder) {
            return Some(*one);
        }
        two.is_of(holder).then_some(*two)
    }

    fn find_among_many(&self, holder: HolderId) -> Option<Share> {
        match self {
            Self::Few(_) => None,
            Self::Row(row) => row.find(holder),
            Self::List(list) => place(list, holder).ok().map(|at| list[at]),
        }
    }

    /// The largest cut; 0 where there is no share.
    #[inline]
    pub(super) fn longest(&self) -> u32 {
        match self {
            Self::Row(row) => row.longest(),
            Self::Few(few) => few[0].cut().max(few[1].cut()),
            Self::List(list) => list.iter().fold(0, |most, share| most.max(share.cut())),
        }
    }

    /// Sets the holder's share; gives whether it had none.
    #[inline(always)]
    pub(super) fn set(&mut self, share: Share) -> bool {
        if let Self::Few([one, _]) = self {
            if one.is_of(share.holder()) {
                *one = share;
                return false;
            }
            if *one == Share::NONE {
                *one = share;
                return true;
            }
        }
        self.set_among_many(share)
    }

    /// [`Shares::set`] where another has a share too.
    fn set_among_many(&mut self, share: Share) -> bool {
        let holder = share.holder();
        match self {
            Self::Few([_, two]) if two.is_of(holder) => {
                *two = share;
                false
            }
            Self::Few(few @ [_, Share::NONE]) => {
                few[1] = share;
                few.sort_unstable();
                true
            }
            Self::Few(few) => {
                let mut list = few.to_vec();
                list.push(share);
                list.sort_unstable();
                *self = Self::List(list);
                true
            }
            Self::List(list) => match place(list, holder) {
                Ok(at) => {
                    list[at] = share;
                    false
                }
                Err(at) => {
                    list.insert(at, share);
                    let span = (list[list.len() - 1].holder().0 - list[0].holder().0) as usize + 1;
                    if list.len() >= ROW_LEAST && span <= list.len() * SPAN_OF_ROW {
                        *self = Self::Row(Row::new(list));
                    }
                    true
                }
            },
            Self::Row(row) => row.set(share).unwrap_or_else(|| self.leave_row(share)),
        }
    }

    /// Adds a share whose holder lies too far away for the row.
    #[cold]
    fn leave_row(&mut self, share: Share) -> bool {
        *self = Self::List(self.iter().collect());
        self.set(share)
    }

    /// Takes the holder's share away; gives whether it had one.
    pub(super) fn remove(&mut self, holder: HolderId) -> bool {
        match self {
            Self::Few(few) => {
                let Some(at) = few.iter().position(|share| share.is_of(holder)) else {
                    return false;
                };
                *few = [if at == 0 { few[1] } else { few[0] }, Share::NONE];
                true
            }
            Self::List(list) => {
                let Ok(at) = place(list, holder) else { return false };
                list.remove(at);
                if let [last] = list[..] {
                    *self = Self::Few([last, Share::NONE]);
                }
                true
            }
            Self::Row(row) => {
                let had = row.remove(holder);
                if row.is_sparse() {
                    let list: Vec<Share> = row.iter().collect();
                    *self = match list[..] {
                        [] => Self::default(),
                        [one] => Self::Few([one, Share::NONE]),
                        [one, two] => Self::Few([one, two]),
                        _ => Self::List(list),
                    };
                }
                had
            }
        }
    }
}

/// Where the holder's share is in a list, or would be.
#[inline]
fn place(list: &[Share], holder: HolderId) -> Result<usize, usize> {
    if list.len() > LINEAR {
        return list.binary_search_by_key(&holder, |share| share.holder());
    }
    let at = list.iter().take_while(|share| share.holder() < holder).count();
    match list.get(at) {
        Some(share) if share.holder() == holder => Ok(at),
        Some(_) | None => Err(at),
    }
}
