// Where the jumps of patched sites arrive (sites.c). The stub in between left, from the lowest address on, the number
// of the site and 128 bytes that the interrupted function may use below its stack pointer (System V red zone).
// Every register comes back as it was.

#define VECTORS 0xe6            // components of the extended state: SSE, AVX, AVX-512
#define HEADER 512              // behind the legacy region (Intel SDM volume 1, chapter 13.4)
#define AREA 2688               // with AVX-512, in the standard format

        .text
        .globl emulator_entry
        .hidden emulator_entry
        .type emulator_entry, @function
emulator_entry:
        pushfq
        // The general registers, so that they lie in memory in the order of their numbers.
        push %r15
        push %r14
        push %r13
        push %r12
        push %r11
        push %r10
        push %r9
        push %r8
        push %rdi
        push %rsi
        push %rbp
        push %rsp               // execute_site puts the right value here
        push %rbx
        push %rdx
        push %rcx
        push %rax

        mov 136(%rsp), %rdi     // behind 16 registers and the flags: the number of the site
        mov %rsp, %rsi
        mov %rsp, %rbp
        sub $AREA, %rsp
        and $-64, %rsp
        xor %eax, %eax          // XRSTOR wants what XSAVE does not write of the header to be zero
        .irp word, 0, 8, 16, 24, 32, 40, 48, 56
        mov %rax, HEADER+\word(%rsp)
        .endr
        mov $VECTORS, %eax
        xor %edx, %edx
        xsave64 (%rsp)
        cld
        call execute_site
        mov %rax, 136(%rbp)     // where to go on, in place of the number
        mov $VECTORS, %eax
        xor %edx, %edx
        xrstor64 (%rsp)
        mov %rbp, %rsp

        pop %rax
        pop %rcx
        pop %rdx
        pop %rbx
        add $8, %rsp
        pop %rbp
        pop %rsi
        pop %rdi
        pop %r8
        pop %r9
        pop %r10
        pop %r11
        pop %r12
        pop %r13
        pop %r14
        pop %r15
        popfq
        ret $128
        .size emulator_entry, . - emulator_entry

        .section .note.GNU-stack, "", @progbits
