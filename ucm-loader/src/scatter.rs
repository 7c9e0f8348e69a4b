//! A shard's copies: one piece, or one for each tensor, merged where they touch.

use ucm_core::DevicePtr;
use ucm_core::device::{CopyKind, CopyOp};

use crate::task::{Destination, TaskState};

/// The copies between `host` (a slot of `shard_bytes`) and the places of shard
/// `index` of `task`. `tensor_bytes` sums up to `shard_bytes`.
pub(crate) fn copies(
    kind: CopyKind,
    task: &TaskState,
    index: usize,
    host: *mut u8,
    shard_bytes: u64,
    tensor_bytes: &[u64],
    into: &mut Vec<CopyOp>,
) {
    into.clear();
    match &task.destination {
        Destination::Host => {}
        Destination::Contiguous => {
            let device = task.shards[index].device;
            into.push(CopyOp { kind, host, device, len_bytes: shard_bytes });
        }
        Destination::Tensors(addresses) => {
            // `Engine::rows` has checked that there is a row for every shard.
            let row = addresses.iter().skip(index * tensor_bytes.len());
            merge(kind, host, row.copied().zip(tensor_bytes.iter().copied()), into);
        }
    }
}

/// The slot's pieces lie one behind the other, so pieces that do so on the
/// device as well are one copy.
fn merge(
    kind: CopyKind,
    host: *mut u8,
    pieces: impl Iterator<Item = (DevicePtr, u64)>,
    into: &mut Vec<CopyOp>,
) {
    let mut offset = 0_u64;
    for (device, len_bytes) in pieces {
        match into.last_mut() {
            Some(last) if last.device.checked_add(last.len_bytes) == Some(device) => {
                last.len_bytes += len_bytes;
            }
            _ => into.push(CopyOp {
                kind,
                host: host.wrapping_add(offset as usize),
                device,
                len_bytes,
            }),
        }
        offset += len_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_touch_on_the_device_are_one_copy() {
        let host = std::ptr::without_provenance_mut::<u8>(0x1000);
        let pieces = [(100, 16), (116, 16), (500, 8), (508, 24), (132, 16)];
        let mut copies = Vec::new();
        merge(
            CopyKind::HostToDevice,
            host,
            pieces.into_iter().map(|(at, len)| (DevicePtr(at), len)),
            &mut copies,
        );
        let seen: Vec<_> =
            copies.iter().map(|op| (op.host.addr() - 0x1000, op.device.0, op.len_bytes)).collect();
        assert_eq!(seen, [(0, 100, 32), (32, 500, 32), (64, 132, 16)]);
    }
}
