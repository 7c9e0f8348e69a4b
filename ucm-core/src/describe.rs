//! `describe!`: a shared layout said once, asserted at compile time, readable at run time.
//!
//! `describe!(Header, size 64, align 64, { 0: magic: [u8; 8], ... })` emits
//! - a compile-time assertion of the size, the alignment and every offset;
//! - a destructuring that names every field with its type, so that a field
//!   that is missing here, or has another type, does not compile;
//! - the [`StructLayout`] table that tools print and the segment's
//!   fingerprint is made of.
//!
//! Under the model checker sizes differ, so the assertions are off there.

/// One field of a shared structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldLayout {
    /// Its name.
    pub name: &'static str,
    /// Its type, as written.
    pub type_name: &'static str,
    /// Where it begins, in bytes from the start of the structure.
    pub offset_bytes: usize,
    /// How long it is.
    pub size_bytes: usize,
}

/// One shared structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Its name.
    pub name: &'static str,
    /// Its size.
    pub size_bytes: usize,
    /// Its alignment.
    pub align_bytes: usize,
    /// Its fields, in order.
    pub fields: &'static [FieldLayout],
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

const fn fold_bytes(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(FNV_PRIME);
        i += 1;
    }
    // A separator, so that ("ab", "c") and ("a", "bc") differ.
    (hash ^ 0xff).wrapping_mul(FNV_PRIME)
}

/// FNV-1a over numbers; the fingerprints' one mixing function.
pub const fn fold_numbers(mut hash: u64, numbers: &[u64]) -> u64 {
    let mut i = 0;
    while i < numbers.len() {
        hash = fold_bytes(hash, &numbers[i].to_le_bytes());
        i += 1;
    }
    hash
}

/// The fingerprint of a set of layouts: names, types, offsets and sizes.
pub const fn fingerprint(layouts: &[StructLayout]) -> u64 {
    let mut hash = FNV_OFFSET;
    let mut s = 0;
    while s < layouts.len() {
        let layout = layouts[s];
        hash = fold_bytes(hash, layout.name.as_bytes());
        hash = fold_numbers(hash, &[layout.size_bytes as u64, layout.align_bytes as u64]);
        let mut f = 0;
        while f < layout.fields.len() {
            let field = layout.fields[f];
            hash = fold_bytes(hash, field.name.as_bytes());
            hash = fold_bytes(hash, field.type_name.as_bytes());
            hash = fold_numbers(hash, &[field.offset_bytes as u64, field.size_bytes as u64]);
            f += 1;
        }
        s += 1;
    }
    hash
}

/// See the module's documentation.
macro_rules! describe {
    ($name:ident, size $size:literal, align $align:literal,
     { $($offset:literal : $field:ident : $ty:ty),* $(,)? }) => {
        #[cfg(not(ucm_loom))]
        const _: () = {
            static_assertions::const_assert_eq!(core::mem::size_of::<$name>(), $size);
            static_assertions::const_assert_eq!(core::mem::align_of::<$name>(), $align);
            $(static_assertions::const_assert_eq!(core::mem::offset_of!($name, $field), $offset);)*
        };

        impl $name {
            /// This structure's fields, for tools and for the fingerprint.
            pub const LAYOUT: $crate::describe::StructLayout = $crate::describe::StructLayout {
                name: stringify!($name),
                size_bytes: $size,
                align_bytes: $align,
                fields: &[$($crate::describe::FieldLayout {
                    name: stringify!($field),
                    type_name: stringify!($ty),
                    offset_bytes: $offset,
                    size_bytes: core::mem::size_of::<$ty>(),
                }),*],
            };

            // Exhaustive and typed: a field left out of the description, or
            // described with another type, does not compile.
            #[allow(dead_code, clippy::unused_unit)]
            fn described(&self) {
                let Self { $($field),* } = self;
                $(let _: &$ty = $field;)*
            }
        }
    };
}
pub(crate) use describe;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_a_field_changes_the_fingerprint() {
        const A: FieldLayout =
            FieldLayout { name: "a", type_name: "u32", offset_bytes: 0, size_bytes: 4 };
        const MOVED: FieldLayout = FieldLayout { offset_bytes: 4, ..A };
        let before = StructLayout { name: "S", size_bytes: 8, align_bytes: 4, fields: &[A] };
        let after = StructLayout { fields: &[MOVED], ..before };
        assert_ne!(fingerprint(&[before]), fingerprint(&[after]));
    }
}
