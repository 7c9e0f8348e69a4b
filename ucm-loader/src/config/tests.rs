//! What the check accepts, and how each refusal names what is wrong.

use std::time::Duration;

use super::*;

fn refused(change: impl FnOnce(&mut LoaderConfig)) -> ConfigError {
    let mut config = LoaderConfig::default();
    change(&mut config);
    config.check().unwrap_err()
}

fn accepted(change: impl FnOnce(&mut LoaderConfig)) -> Config {
    let mut config = LoaderConfig::default();
    change(&mut config);
    config.check().unwrap()
}

#[test]
fn what_is_left_out_follows_from_what_is_there() {
    let config = accepted(|c| {
        c.backend_workers = 3;
        c.timeout_ms = 100;
        c.rank = 2;
        c.local_rank_size = 4;
    });
    assert_eq!((config.slot_count, config.reserved_slots, config.shards_per_block), (4096, 256, 8));
    assert_eq!((config.claim_window, config.device_id), (6, 2));
    assert_eq!(config.io_quarantine, Duration::from_millis(200));
    let shape = config.shape();
    assert_eq!((shape.slot_count, shape.reserved_slots, shape.shards_per_block), (4096, 256, 8));
    assert_eq!((shape.local_rank_size, shape.participants), (4, 32));
    assert_eq!(shape.content_tag, config.store_geometry().content_tag);
}

#[test]
fn a_shard_that_is_no_power_of_two_takes_whole_pages_of_the_capacity() {
    let config = accepted(|c| {
        c.shard_bytes = 5000;
        c.block_bytes = 10_000;
        c.capacity_bytes = 10 * 8192;
    });
    assert_eq!((config.slot_count, config.shards_per_block), (10, 2));
}

#[test]
fn the_default_reserve_never_takes_the_last_slot_of_a_rank() {
    let config = accepted(|c| {
        c.local_rank_size = 31;
        c.capacity_bytes = 32 * c.shard_bytes;
    });
    assert_eq!((config.slot_count, config.reserved_slots), (32, 1));
    let exact = accepted(|c| {
        c.local_rank_size = 20;
        c.capacity_bytes = 20 * c.shard_bytes;
    });
    assert_eq!((exact.slot_count, exact.reserved_slots), (20, 0));
}

#[test]
fn a_capacity_below_one_slot_per_rank_says_how_much_is_needed() {
    let error = refused(|c| {
        c.local_rank_size = 4;
        c.capacity_bytes = 4 * c.shard_bytes - 1;
    });
    let needed = 4 * (256 << 10);
    assert!(
        matches!(error, ConfigError::CapacityTooSmall { needed_bytes, local_rank_size: 4, .. } if needed_bytes == needed)
    );
    let text = error.to_string();
    assert!(text.contains("capacity_bytes = 1048575") && text.contains("1048576"), "{text}");
}

#[test]
fn a_shard_size_of_zero_or_that_does_not_divide_the_block_is_refused() {
    assert!(matches!(refused(|c| c.shard_bytes = 0), ConfigError::ShardZero { min: 8 }));
    let error = refused(|c| c.shard_bytes = 300_000);
    assert!(matches!(
        error,
        ConfigError::ShardNotADivisor { shard_bytes: 300_000, nearest: 2_100_000, .. }
    ));
    let error = refused(|c| c.block_bytes = 4096);
    assert!(matches!(error, ConfigError::OutOfRange { key: "block_bytes", value: 4096, .. }));
    let error = refused(|c| c.shard_bytes = 4);
    assert!(matches!(error, ConfigError::OutOfRange { key: "shard_bytes", value: 4, min: 8, .. }));
}

#[test]
fn a_rank_beyond_the_node_is_refused() {
    let error = refused(|c| {
        c.local_rank_size = 4;
        c.rank = 4;
    });
    assert!(matches!(error, ConfigError::RankOutOfRange { rank: 4, local_rank_size: 4 }));
    let error = refused(|c| c.local_rank_size = 0);
    assert!(matches!(error, ConfigError::OutOfRange { key: "local_rank_size", value: 0, .. }));
    let error = refused(|c| c.local_rank_size = 32);
    assert!(matches!(error, ConfigError::OutOfRange { key: "local_rank_size", max: 31, .. }));
}

#[test]
fn a_reserve_that_leaves_a_rank_without_a_slot_is_refused() {
    let error = refused(|c| c.reserved_slots = Some(4096));
    assert!(matches!(error, ConfigError::ReserveTooLarge { reserved_slots: 4096, max: 4095, .. }));
    assert_eq!(accepted(|c| c.reserved_slots = Some(4095)).reserved_slots, 4095);
}

#[test]
fn participants_come_in_steps_and_the_next_one_is_named() {
    let error = refused(|c| c.participants = 40);
    assert!(matches!(error, ConfigError::ParticipantStep { participants: 40, nearest: 64, .. }));
    let error = refused(|c| c.participants = 256);
    assert!(matches!(error, ConfigError::OutOfRange { key: "participants", max: 224, .. }));
}

#[test]
fn the_backend_is_one_of_two_kinds() {
    let posix = accepted(|c| c.backend = "posix:/data/kv".to_owned());
    assert_eq!(posix.backend, BackendChoice::Posix { dir: "/data/kv".into() });
    let memory = accepted(|c| c.backend = "memory:test".to_owned());
    let expected = BackendChoice::Memory { name: "test".to_owned(), capacity_blocks: 512 };
    assert_eq!(memory.backend, expected);
    for wrong in ["", "posix", "posix:", "redis:host", "/data/kv"] {
        let error = refused(|c| c.backend = wrong.to_owned());
        assert!(matches!(error, ConfigError::UnknownBackend { value } if value == wrong));
    }
    let error = refused(|c| c.backend = "memory:a/b".to_owned());
    assert!(matches!(error, ConfigError::BadName { key: "backend", .. }));
    let error = refused(|c| {
        c.backend = "memory:small".to_owned();
        c.memory_backend_bytes = 5;
    });
    assert!(matches!(error, ConfigError::MemoryBackendTooSmall { memory_backend_bytes: 5, .. }));
}

#[test]
fn names_and_paths_that_lead_elsewhere_are_refused() {
    for wrong in ["", "a/b", "..", ".hidden", "white space"] {
        let error = refused(|c| c.segment_id = wrong.to_owned());
        assert!(
            matches!(error, ConfigError::BadName { key: "segment_id", value } if value == wrong)
        );
    }
    let error = refused(|c| c.shm_dir = "shm".into());
    assert!(matches!(error, ConfigError::RelativePath { key: "shm_dir", .. }));
}

#[test]
fn counts_and_times_outside_their_limits_name_key_value_and_limit() {
    type Change = fn(&mut LoaderConfig);
    let cases: [(&str, Change); 8] = [
        ("backend_workers", |c| c.backend_workers = 0),
        ("claim_window", |c| c.claim_window = Some(0)),
        ("lookahead", |c| c.lookahead = Some(0)),
        ("waiting_queue_depth", |c| c.waiting_queue_depth = 0),
        ("running_queue_depth", |c| c.running_queue_depth = 0),
        ("stream_number", |c| c.stream_number = 0),
        ("timeout_ms", |c| c.timeout_ms = 0),
        ("timeout_ms", |c| c.timeout_ms = u64::MAX),
    ];
    for (expected, change) in cases {
        let error = refused(change);
        assert!(matches!(error, ConfigError::OutOfRange { key, .. } if key == expected), "{error}");
        assert!(error.to_string().starts_with(&format!("{expected} = ")), "{error}");
    }
    let error = refused(|c| c.io_quarantine_ms = Some(29_999));
    assert!(matches!(
        error,
        ConfigError::QuarantineTooShort { io_quarantine_ms: 29_999, timeout_ms: 30_000 }
    ));
}

#[test]
fn another_model_checksum_or_geometry_has_another_content_tag() {
    let base = accepted(|_| {}).content_tag;
    assert_eq!(accepted(|c| c.capacity_bytes *= 2).content_tag, base);
    assert_ne!(accepted(|c| c.model = "m".to_owned()).content_tag, base);
    assert_ne!(accepted(|c| c.checksum = false).content_tag, base);
    assert_ne!(accepted(|c| c.shard_bytes /= 2).content_tag, base);
    assert_ne!(accepted(|c| c.block_bytes *= 2).content_tag, base);
}
